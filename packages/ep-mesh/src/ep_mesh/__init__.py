"""What runs where: sizes, layouts and device meshes for expert parallelism."""
