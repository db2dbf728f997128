"""The gateway: a client of the swarm that serves OpenAI's HTTP API. No other package of the client imports it."""
