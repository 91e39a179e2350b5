"""What every job shares."""
