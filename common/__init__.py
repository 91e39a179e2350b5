"""Code that all jobs share."""

VERSION = "0.2.0"
