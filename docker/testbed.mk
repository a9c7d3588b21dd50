# The compose testbed; included by the Makefile.
.PHONY: testbed testbed-down test-docker

testbed: ## build the relay's containers, bring them up, show scores being served (needs Docker)
	docker/testbed.sh up

testbed-down: ## remove the testbed: containers, networks, volumes, image
	docker/testbed.sh down

test-docker: $(STAMP) ## the testbed as a test: a foreign request, a killed worker, nothing left (needs Docker)
	docker/testbed.sh engine
	RELAYGR_TEST_DOCKER=1 $(BIN)/pytest -m docker tests/docker $(ARGS)
