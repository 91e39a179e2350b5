"""Code that all jobs share."""

VERSION = "0.3.0"
