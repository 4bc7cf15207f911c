"""Files, JSON and TOML, processes and wording: what every package uses, and no user."""
