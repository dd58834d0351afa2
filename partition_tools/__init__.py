"""Offline half: a graph file becomes one HDF5 shard a rank, and a report that compares partitionings."""
