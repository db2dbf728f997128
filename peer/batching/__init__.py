"""What runs next on the device, and running it."""
