"""The route inspector: peers, layers and routes of a swarm, as data and as a picture."""
