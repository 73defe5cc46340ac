"""How the server is deployed: `Dockerfile.triton` uses requirements.py, docs/deploying.md explains the rest.

slurm/          batch scripts for Enroot and Pyxis, one node and several
kubernetes/     one pod (Deployment), several nodes (LeaderWorkerSet)
"""
