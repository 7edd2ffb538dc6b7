"""The estimator that a practitioner holds: teach, predict, save, load, export."""
