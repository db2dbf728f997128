"""What this machine allows at most: the same graphs with less around them."""
