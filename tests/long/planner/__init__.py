"""Plans, searched for longer."""
