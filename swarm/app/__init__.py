"""The command `swarm` and what only it uses: demo, doctor, serve, a swarm of local processes. Nothing imports this."""
