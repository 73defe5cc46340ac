"""The optional features of a step on the device."""
