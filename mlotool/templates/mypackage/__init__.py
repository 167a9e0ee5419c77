"""Two moons with wrong labels: an upper problem learns how often labels are wrong, from a few clean samples."""
