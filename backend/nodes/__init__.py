"""One engine over several nodes: docs/guides/nodes.md.

launchers   this node's place in the job, from the launcher's environment
meeting     node 0's address and the secret, over MPI once (mpi_exchange) or from the environment
link        the encrypted connection between the supervisors
leader      node 0: tracks the nodes, spreads the ranks over them
lender      the other nodes: run ranks for node 0
"""
