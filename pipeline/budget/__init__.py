"""Estimates of the memory and time that a step needs on a machine, made before loading anything."""
