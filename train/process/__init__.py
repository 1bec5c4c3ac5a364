"""A command as a process: what it prints, how it is interrupted, how it ends and with which exit status."""
