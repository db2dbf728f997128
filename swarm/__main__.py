"""`python -m swarm` runs the command `swarm`."""

from swarm.app.main import main

if __name__ == "__main__":
    main()
