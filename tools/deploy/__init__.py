"""Deployment: `Dockerfile.triton` uses requirements.py, docs/guides/deploying.md explains the rest.

slurm/          batch scripts for Enroot and Pyxis, one node and several
kubernetes/     one pod (Deployment), several nodes (LeaderWorkerSet)
"""
