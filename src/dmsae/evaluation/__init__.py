"""What an SAE is worth on text it has never seen."""
