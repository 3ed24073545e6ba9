"""What runs beside the training loop: metrics, progress, and which checkpoint a run goes on from."""
