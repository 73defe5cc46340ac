"""Weight directories: layout, manifest, reading at any tensor-parallel degree."""
