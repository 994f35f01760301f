"""What asv tracks from commit to commit."""
