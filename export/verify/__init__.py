"""Does a package compute what its source computes?"""
