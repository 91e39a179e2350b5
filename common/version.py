"""The version of this project, as it stands in the log, in every checkpoint and in a bundle."""

VERSION = "0.2.0"
