"""Code that all jobs share."""
