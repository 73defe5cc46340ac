"""Weight directories: layout, manifest, reading at any parallel degree."""
