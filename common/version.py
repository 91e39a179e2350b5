"""The version of this project, which is written to the log, to every checkpoint and to a bundle."""

VERSION = "0.2.0"
