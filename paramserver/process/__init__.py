"""What every process of ours has: log lines, pauses kept short, a ready file."""
