"""The gateway: a client of the swarm that speaks OpenAI's HTTP API. Nothing else of this program imports it."""
