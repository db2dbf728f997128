"""What belongs to the operating system: threads, priorities, child processes, folders, the event loop."""
