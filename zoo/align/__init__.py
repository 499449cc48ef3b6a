"""Word times: a CTC model says when each word of a text was spoken (`ctc.Aligner`)."""
