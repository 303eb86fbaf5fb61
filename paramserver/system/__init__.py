"""The operating system and the process: files, memory, logging, threads, settings."""
