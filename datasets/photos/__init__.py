"""Photographs: which files there are, where each is cropped, and how it becomes the network's input."""
