"""What a recipe will need before it starts: memory, disk, traffic and time."""
