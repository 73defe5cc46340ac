"""What every part of the backend uses, without imports of ours."""
