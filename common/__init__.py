"""Code that all jobs share."""

VERSION = "0.4.0"
