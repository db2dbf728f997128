"""Operating system facilities: threads, priorities, child processes, folders, the event loop."""
