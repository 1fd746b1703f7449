"""The gates: each a name, its cases, and checks that compare every prompt position.

``GATES`` in run order; ``test_gates`` runs them under pytest on the engine that is asked for:
``pytest --pyargs afd_testkit.gates --afd-engine vllm-cpu``.
"""
