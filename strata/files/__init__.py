"""What users and checkpoints' folders hold, read strictly: JSON, TOML, downloads, locks. Loads no torch."""
