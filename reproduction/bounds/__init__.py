"""Upper bounds on this machine: the same graphs with less software around them."""
