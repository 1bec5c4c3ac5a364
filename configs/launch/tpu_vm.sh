#!/bin/sh
# TPU VMs with gcloud: the same command on all hosts of a slice.
#
#   TPU=NAME ZONE=us-east5-a SHARED=/mnt/shared sh configs/launch/tpu_vm.sh configs/quickstart.yaml mesh.fsdp=-1
#
# The checkout, with its environment (`make .venv/.ready-tpu`), is in ~/kljax of every host; SHARED is a directory that
# all hosts see. The run goes on when the connection ends; its log is ~/kljax/train.log of each host.
arguments=$(printf "'%s' " "$@" "output=$SHARED/runs" "compile_cache=$SHARED/compiled")
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all --command \
  "cd kljax && nohup sh -c '
    until .venv/bin/python -m train \"\$@\" --resume-or-start --join-timeout 600; do
      # An error that you can fix (2), the guard (3) and a signal (130) end it; a lost process and a crash start it again.
      case \$? in 2 | 3 | 130) break ;; esac
      sleep 10
    done' sh $arguments >> train.log 2>&1 < /dev/null &"
