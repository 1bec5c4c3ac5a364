#!/bin/sh
# xpk on GKE, TPUs: 2 slices of v5p-64. xpk makes the JobSet and puts it into Kueue's queue of the cluster.
#
#   CLUSTER=NAME IMAGE=REGISTRY/kljax-tpu SHARED=/shared sh configs/launch/xpk.sh --dry-run
#
# Change: tpu-type with num-slices and mesh.slices, and the config. SHARED is a directory that all hosts see: add it to
# the cluster with `xpk storage attach`. Further options go to xpk.
# In place of SHARED/runs: output=gs://BUCKET/runs, with the extra gcs in the image (docs/storage.md).
exec "${XPK:-xpk}" workload create \
  --cluster "$CLUSTER" \
  --workload "${WORKLOAD:-kljax}" \
  --docker-image "$IMAGE" \
  --tpu-type v5p-64 \
  --num-slices 2 \
  --max-restarts 10 \
  --restart-on-exit-codes 75 \
  --termination-grace-period-seconds 300 \
  --command ".venv/bin/python -m train configs/gsm8k_qwen3_8b_v5p64.yaml name=gsm8k \
'mesh={data: 2, fsdp: -1, slices: 2}' output=$SHARED/runs compile_cache=$SHARED/compiled \
--resume-or-start --join-timeout 1800" \
  "$@"
