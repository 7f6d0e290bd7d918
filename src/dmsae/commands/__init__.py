"""What the command line can do, by noun. Each command parses, calls the package, and prints what came back."""
