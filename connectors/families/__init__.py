"""The families of public checkpoints: a key table and the meaning of config.json each, and the list of them."""
