"""What a call consists of: tensors, mask terms, options, and the check of each."""
