"""The command `swarm` with its demo, doctor, serve and local swarm. No other package imports this one."""
