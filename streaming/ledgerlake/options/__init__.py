"""What users set: the options of the source, the configuration file, and the options of other
connectors.
"""
