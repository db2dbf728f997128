"""The protocol between machines, without I/O: nothing here knows asyncio or sockets."""
