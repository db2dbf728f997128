"""Finding peers and files: records, the directory, the DHT, look-ups at any peer, downloads from peers."""
