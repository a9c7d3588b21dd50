"""DlrmHSTU, the model of MLPerf's DLRMv3, trained with meta-recsys/generative-recommenders and served here."""
