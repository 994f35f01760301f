"""How tokens travel to their experts and back."""
