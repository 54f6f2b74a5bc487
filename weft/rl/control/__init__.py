"""Control: small policies that learn to act in environments with Gymnasium's interface.

A recipe with the section ``[control]`` runs :func:`weft.rl.control.control_run.control_job` instead of a training job.
"""
