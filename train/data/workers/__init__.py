"""Worker processes for code and texts that may hang, exit or take all memory, and that can be killed."""
